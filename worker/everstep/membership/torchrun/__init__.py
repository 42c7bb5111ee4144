"""The rendezvous handlers of stock torchrun for `--rdzv-backend=everstep` and `=etcd-v3`."""
