"""Expectations end by their event, by a failed write, or by time; nothing else."""

from everstep_operator.runtime.expectations import Expectations


def test_key_waits_until_every_creation_and_deletion_was_observed() -> None:
    expectations: Expectations[str] = Expectations(expiry=30)
    expectations.expect("job", creations=["w0", "w1"], deletions=["uid-9"], now=0)
    assert expectations.pending("job", 1) is not None
    expectations.observe_created("job", "w1")
    expectations.observe_deleted("job", "uid-9")
    pending = expectations.pending("job", 1)
    assert pending is not None
    assert pending.reason == "waiting to observe creation of w0"
    expectations.observe_created("job", "w0")
    assert expectations.pending("job", 1) is None
    assert len(expectations) == 0


def test_event_that_overtakes_the_response_is_counted() -> None:
    expectations: Expectations[str] = Expectations()
    expectations.expect("job", creations=["w0"], now=0)
    expectations.observe_created("job", "w0")
    assert expectations.pending("job", 0) is None


def test_failed_write_does_not_hold_the_key() -> None:
    expectations: Expectations[str] = Expectations()
    expectations.expect("job", creations=["w0"], deletions=["u"], now=0)
    expectations.cancel_creation("job", "w0")
    expectations.cancel_deletion("job", "u")
    assert expectations.pending("job", 0) is None


def test_lost_event_holds_the_key_only_until_expiry() -> None:
    expectations: Expectations[str] = Expectations(expiry=30)
    expectations.expect("job", creations=["w0"], now=100)
    assert expectations.pending("job", 129.9) is not None
    assert expectations.pending("job", 130) is None
    expectations.expect("job", deletions=["u"], now=131)
    pending = expectations.pending("job", 131)
    assert pending is not None
    assert pending.creations == frozenset()


def test_same_name_under_another_uid_does_not_satisfy_a_deletion() -> None:
    expectations: Expectations[str] = Expectations()
    expectations.expect("job", deletions=["old"], now=0)
    expectations.observe_deleted("job", "new")
    assert expectations.pending("job", 0) is not None


def test_keys_do_not_share_expectations_and_forget_drops_them() -> None:
    expectations: Expectations[str] = Expectations()
    expectations.expect("a", creations=["w0"], now=0)
    assert expectations.pending("b", 0) is None
    expectations.observe_created("b", "w0")
    assert expectations.pending("a", 0) is not None
    expectations.forget("a")
    assert expectations.pending("a", 0) is None
