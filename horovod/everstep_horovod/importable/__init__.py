"""A folder for `sys.path`: `import horovod` finds the package in it."""
