"""What stock torchrun loads for `--rdzv-backend=everstep` and `=etcd-v3`."""
