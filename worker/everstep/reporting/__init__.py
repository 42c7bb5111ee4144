"""Reports the progress of training to the operator. It needs only the standard library and `everstep.contract`, so it
costs little to import."""
