"""The names of the scenarios that run over both backends, for who must not import all of PyTorch to know them."""

COLLECTIVES = """
    broadcast all_reduce_dtypes all_reduce_bits all_reduce_bool all_reduce_averages all_reduce_shapes coalesced
    reduce_to_roots all_gathers all_gather_uneven gather_and_scatter reduce_scatters all_to_alls messages objects groups
    asynchronous in_pieces threads functional
""".split()
API = """
    methods_of_groups scalars averages_of_integers sparse_sums highest_tags futures ddp_waiting_hooks ddp_builtin_hooks
    ddp_join_counting_who_is_there events monitored
""".split()
TRAINING = """
    ddp ddp_unused_parameters ddp_no_sync ddp_hooks ddp_low_precision_hooks ddp_power_sgd ddp_join ddp_of_a_group
    zero_redundancy_optimizer dtensor tensor_parallel mesh_of_two_axes fsdp2 fsdp2_mixed_precision fsdp2_of_two_axes
    checkpoint
""".split()
PIPELINES = ["pipelines"]
SCENARIOS = COLLECTIVES + API + TRAINING + PIPELINES
