"""Stand-ins for nvidia-cuda-mps-control and nvidia-cuda-mps-server over simulated GPUs.

They are real processes with the files of the real ones in `CUDA_MPS_PIPE_DIRECTORY`, and answer commands as drivers
535, 550 and 555 were seen to; what is known of 615 only from documents is marked so. The protocol on the socket is
their own, as the real one is private.
"""
