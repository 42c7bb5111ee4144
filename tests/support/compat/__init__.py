"""For the tests of other libraries' interfaces."""
