"""The forms of version 1, letter for letter: what running agents write, and what an operator finds written.

A job keeps its library while the operator is upgraded. Whoever changes one of these texts refuses the agents of running
jobs, which then fail: give the form another number in `version`, and read both.
"""

from __future__ import annotations

from everstep.contract.document import (
    VERSION,
    Document,
    JoinRequest,
    Loss,
    Member,
    Report,
    Seat,
    Setback,
    Sizes,
    decode,
    decode_join_request,
    encode,
)

A, B, C = (Member(i, f"a-{i}", 2, 1, "10.0.0.1", 4000, 5000) for i in range(3))
SIZES = Sizes(2, 4, (2, 4))
JOIN_REQUEST = JoinRequest(A, 7, SIZES, patient=True)
JOIN_REQUEST_TEXT = b'{"version":1,"join":[[0,"a-0",2,1,"10.0.0.1",4000,5000],7,[2,4,[2,4]]],"patient":true}'
DOCUMENT = Document(
    SIZES, "a-0", 3, 5, (A, B), (Loss("a-1", "ended"),), (C,), (Seat(1, "a-1", 2, ("a-9",)),),
    (Report("a-0", "a-1", True, 2),), "lost", 100, ("a-0",), ("a-1",), True, True, 2, 1,
    (Setback(4, "a-1", "ended", True),), "over",
)  # fmt: skip
DOCUMENT_TEXT = (
    b'{"version":1,"id":"a-0","floor":3,"sizes":[2,4,[2,4]],"round":5,"members":[[0,"a-0",2,1,"10.0.0.1",'
    b'4000,5000],[1,"a-1",2,1,"10.0.0.1",4000,5000]],"gone":[["a-1","ended"]],"joining":[[2,"a-2",2,1,'
    b'"10.0.0.1",4000,5000]],"seats":[[1,"a-1",2,["a-9"]]],"reports":[["a-0","a-1",true,2]],'
    b'"broken":"lost","boundary":100,"done":["a-0"],"stopping":["a-1"],"in_process":true,"ruled":true,"surge":2,'
    b'"restarts":1,"history":[[4,"a-1","ended",true]],"closed":"over"}'
)


def test_forms_of_a_join_request_and_of_a_document_are_those_of_their_version() -> None:
    assert VERSION == 1
    assert (JOIN_REQUEST.encode(), decode_join_request(JOIN_REQUEST_TEXT)) == (JOIN_REQUEST_TEXT, JOIN_REQUEST)
    assert (encode(DOCUMENT), decode(DOCUMENT_TEXT)) == (DOCUMENT_TEXT, DOCUMENT)
