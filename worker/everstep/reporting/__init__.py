"""Tells the operator how training goes. Standard library and `everstep.contract` alone: it costs little to import."""
