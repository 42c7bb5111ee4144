"""The `everstep` command: `everstep ckpt`, and the commands that other distributions bring."""
