"""The control plane's decisions: who is there, who belongs together, who gets traffic (pure)."""
