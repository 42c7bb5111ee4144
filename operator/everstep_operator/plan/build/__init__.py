"""From a decision to a plan: pods and other objects, the status, conditions, events and the record of a recovery."""
