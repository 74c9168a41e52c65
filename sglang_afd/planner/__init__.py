"""Says before deploying whether attention-FFN disaggregation pays; pure Python and numpy.

`predict.predict` is the way in. It reads five descriptions and nothing else: `shape.ModelShape`,
`gpu.Gpu`, `deployment.Deployment`, `deployment.Workload` and `constants.Constants`.
"""
