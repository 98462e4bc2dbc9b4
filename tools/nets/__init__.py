"""Commands that look for cases which nobody named; README.md beside this file has them all."""
