"""A leaderboard of methods on the same features: accuracy against bytes."""
