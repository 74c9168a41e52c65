"""What bench_router measures with: a fake attention server, a load generator, and the routers."""
