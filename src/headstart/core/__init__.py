"""The values that cross rooms: named arrays, plans, statistics, messages, costs; and files that are whole or absent."""
