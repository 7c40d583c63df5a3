"""What umbel shows to a person who sits at a terminal."""
