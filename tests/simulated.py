"""XLA's flags for simulated CPU devices, which are set before JAX is imported."""


def flags(devices: int = 8) -> str:
  """They share a few threads, on machines that may be busy.

  XLA ends a process whose devices wait 40 s for each other. And by its default order two collectives of one program
  run at once where neither needs the other: some devices then wait in one, some in the other, for ever.
  """
  return (
    f'--xla_force_host_platform_device_count={devices} --xla_cpu_collective_call_terminate_timeout_seconds=600'
    ' --xla_cpu_enable_concurrency_optimized_scheduler=false'
    ' --xla_cpu_parallel_codegen_split_count=1'  # a program compiled in parts takes a tenth more CPU
  )
