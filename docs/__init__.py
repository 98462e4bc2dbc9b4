"""The pages of the site, and the programs that make and check them."""
