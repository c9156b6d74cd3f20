"""What happens to an update on its way from client to server: clipping, noise, robust means, secure sums."""
