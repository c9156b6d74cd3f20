"""What a client does with a model: SGD on stacked heads or on a network, or slopes along random directions."""
