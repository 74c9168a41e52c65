"""In which order an MLP rank serves what has arrived (pure: integers in, decisions out)."""
