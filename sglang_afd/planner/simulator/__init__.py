"""Plays a deployment event by event, with the round logic that the real system runs.

`simulation.simulate` is the way in; `replay.replay` plays a recorded timeline again.
"""
