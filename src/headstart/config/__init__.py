"""What a user may write, with every default, once; and what is wrong with it, in words."""
