"""Who runs the rounds, what stays with clients between them, and the backbone they share."""
