"""The agent: the supervisor of a worker's training processes, `everstep-run`.

Events in, a pure decision, instructions out: `state` decides, `loop` carries out. The agent's own process never imports
torch: its warm parent does, once, and forks the training processes.
"""
