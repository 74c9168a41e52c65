"""A report of one page that a person reads in a minute."""
