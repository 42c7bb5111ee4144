"""How agents speak with the round store in the operator: paths, headers and bounds.

Which job is meant is said by the bearer token alone (its pod's). A document's version grows with each change of it; 0
means that there is none. The count of expirations grows with each presence that expired, and with each new leader. On
the wire it is named `lapses`, as it was first: agent and operator may be of different releases.

| call | request | answer |
|---|---|---|
| read | GET document?version=V&lapses=L (what it knows; 0, -1) | 200 document, 204 there is none, 304 the same |
| watch | GET document?version=V&lapses=L&wait=SECONDS | the same, as soon as it differs, else 304 |
| compare and swap | PUT document, Everstep-Version: EXPECTED | 204 with its version, 412 another is there |
| announce | PUT presence/AGENT, Everstep-Ttl: SECONDS, body: the join request | as read, and Everstep-Grace: seconds |
| renew | POST presence/AGENT | 204, 410 it has expired |
| withdraw | DELETE presence/AGENT | 204 |
| present | GET presence | 200 {agent: join request as text} |

In the seconds of Everstep-Grace the operator writes the join request into the document.
Each of these answers has Everstep-Leader: the URL of the leader's own address, as a redirect names it.

Each may be answered 307 by a follower, to the same path at the leader; 400 not understood; 401 no valid token; 403 not
for this pod; 413 too large; 503 with Retry-After, again later. What is not 2xx, 304 or 307 has `{"reason": text}`.
"""

from __future__ import annotations

DOCUMENT_PATH = "/v1/rounds/document"
PRESENCE_PATH = "/v1/rounds/presence"

VERSION_HEADER = "Everstep-Version"
EXPIRATIONS_HEADER, EXPIRATIONS_PARAMETER = "Everstep-Lapses", "lapses"
TTL_HEADER = "Everstep-Ttl"
GRACE_HEADER = "Everstep-Grace"
LEADER_HEADER = "Everstep-Leader"

MAX_JOIN_REQUEST_BYTES = 16 * 1024
MAX_PRESENT_BYTES = 8 * 1024 * 1024  # of one job's join requests together
MAX_WAIT = 30.0  # seconds of one watch
MIN_TTL, MAX_TTL = 1.0, 300.0  # seconds
