"""The round stores (etcd, the operator, this process), and the keys of `--rdzv-conf` that configure them."""
