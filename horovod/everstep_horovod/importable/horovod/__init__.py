"""The name `horovod` in a process that multiprocessing has started anew: it gets its parent's `sys.path` alone."""

from everstep_horovod import install

install()
