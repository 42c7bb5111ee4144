"""Who trains together: rounds that no single death can break.

`rounds` decides, `participant` says what one agent would write next, `driver` does it over a `RoundStore`; `http`,
`etcd` and `memory` are stores, `handlers` is what torchrun loads. Only `torchrun` imports torch.
"""
