"""The options of a run, by the sections of its configuration: adding an option is one line here."""
