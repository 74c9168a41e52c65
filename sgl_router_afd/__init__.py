"""The router in front of the attention servers; imports neither torch nor SGLang."""
