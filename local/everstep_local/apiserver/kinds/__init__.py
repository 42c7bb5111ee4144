"""The server's checks and defaults for each kind of object."""
