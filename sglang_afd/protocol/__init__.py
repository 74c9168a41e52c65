"""What the two roles say to each other: typed messages, their encoding, the handshake.

Pure: neither torch nor SGLang is imported here.
"""
