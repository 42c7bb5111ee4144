"""The one room for private names of torch, and of the libraries that adapters, data sources and stores use.

A name is private if it begins with `_`, or lies in a module or class whose name does. Nothing promises that the next
version still has it. Each module here is of one subject. `table` lists all names: what each is for, since which version
it exists, and what public way would replace it. `names` looks for them at a start, and `everstep doctor` for all of
them. `patches` replaces functions of libraries and takes them back.

Invariant: no other file of the package touches a private name of a library; `tests/unit/test_torch_private.py` reads
all sources. Importing this package imports nothing. Its modules import of Everstep only `contract`.
"""
