"""The agent: the supervisor of a worker's training processes, `everstep-run`.

Events come in, a pure function decides, instructions go out: `decide` decides, `loop` carries out. The agent's own
process never imports torch: its fork server does, once, and forks the training processes (`processes`).
"""
