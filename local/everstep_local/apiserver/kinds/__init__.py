"""What the server checks and fills in for each kind of object."""
