"""The random numbers of datasets: a function of seed, epoch and sample, whichever process reads it."""
