"""A federation of real machines on Flower: its apps, its folder, and who may start what."""
