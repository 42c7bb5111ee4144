"""One module for each kind of store; `everstep.storage.opening` chooses by the URL."""
