"""Networks that tests cut, slow down and listen on."""
