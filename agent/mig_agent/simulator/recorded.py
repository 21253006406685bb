"""Recorded tables of what each GPU model reports, written as `nvidia-smi mig -lgip` prints them.

These rows are the simulator's own and come from captured driver output; they are deliberately not read from
`profiles/`, which feeds the planner, so that a mistake in one shows against the other. Rows under a `not captured`
comment hold inferred values.

Columns: name; profile enum; profile id; compute slices; instanceCount; SMs; memory in MiB; copy engines; decoders;
encoders; JPEG engines; OFA engines; size of a placement in memory slices; the starts of its placements.
"""

from __future__ import annotations

from types import MappingProxyType

# NVML's instanceCount is wrong on an A30 (mig-parted keeps its own numbers for that reason). Which wrong number is not
# recorded; half of the truth is used for the plain profiles, so that a buffer sized from it is too short.
A30 = """
1g.6gb             0  14      1     2   14    5952   1   1   0    0   0    1  0,1,2,3
1g.6gb+me          7  21      1     1   14    5952   1   1   0    1   1    1  0,1,2,3
2g.12gb            1   5      2     1   28   11968   2   2   0    0   0    2  0,2
2g.12gb+me         8   6      2     1   28   11968   2   2   0    1   1    2  0,2
4g.24gb            3   0      4     1   56   24000   4   4   0    1   1    4  0
"""

A100_40GB = """
1g.5gb             0  19      1     7   14    4864   1   0   0    0   0    1  0,1,2,3,4,5,6
1g.5gb+me          7  20      1     1   14    4864   1   1   0    1   1    1  0,1,2,3,4,5,6
1g.10gb            9  15      1     4   14    9856   1   1   0    0   0    2  0,2,4,6
2g.10gb            1  14      2     3   28    9856   2   1   0    0   0    2  0,2,4
3g.20gb            2   9      3     2   42   19968   3   2   0    0   0    4  0,4
4g.20gb            3   5      4     1   56   19968   4   2   0    0   0    4  0
7g.40gb            4   0      7     1   98   40192   7   5   0    1   1    8  0
"""

A100_80GB = """
1g.10gb            0  19      1     7   14    9728   1   0   0    0   0    1  0,1,2,3,4,5,6
1g.10gb+me         7  20      1     1   14    9728   1   1   0    1   1    1  0,1,2,3,4,5,6
1g.20gb            9  15      1     4   14   19968   1   1   0    0   0    2  0,2,4,6
2g.20gb            1  14      2     3   28   19968   2   1   0    0   0    2  0,2,4
3g.40gb            2   9      3     2   42   40192   3   2   0    0   0    4  0,4
4g.40gb            3   5      4     1   56   40192   4   2   0    0   0    4  0
7g.80gb            4   0      7     1   98   80896   7   5   0    1   1    8  0
"""

# SMs of the SXM5 part.
H100_80GB = """
1g.10gb            0  19      1     7   16    9984   1   1   0    1   0    1  0,1,2,3,4,5,6
1g.10gb+me         7  20      1     1   16    9984   1   1   0    1   1    1  0,1,2,3,4,5,6
1g.20gb            9  15      1     4   26   20096   1   1   0    1   0    2  0,2,4,6
2g.20gb            1  14      2     3   32   20096   2   2   0    2   0    2  0,2,4
3g.40gb            2   9      3     2   60   40448   3   3   0    3   0    4  0,4
4g.40gb            3   5      4     1   64   40448   4   4   0    4   0    4  0
7g.80gb            4   0      7     1  132   81152   8   7   0    7   1    8  0
"""

H100_94GB = """
1g.12gb            0  19      1     7   16   11008   1   1   0    1   0    1  0,1,2,3,4,5,6
1g.12gb+me         7  20      1     1   16   11008   1   1   0    1   1    1  0,1,2,3,4,5,6
1g.24gb            9  15      1     4   26   22144   1   1   0    1   0    2  0,2,4,6
2g.24gb            1  14      2     3   32   22144   2   2   0    2   0    2  0,2,4
3g.47gb            2   9      3     2   60   47488   3   3   0    3   0    4  0,4
4g.47gb            3   5      4     1   64   47488   4   4   0    4   0    4  0
7g.94gb            4   0      7     1  132   95360   8   7   0    7   1    8  0
"""

# Placements not captured; all values of the H100 with 96 GB are those of the GH200, whose GPU it is.
GH200_96GB = """
1g.12gb            0  19      1     7   16   11264   1   1   0    1   0    1  0,1,2,3,4,5,6
1g.12gb+me         7  20      1     1   16   11264   1   1   0    1   1    1  0,1,2,3,4,5,6
1g.24gb            9  15      1     4   26   23552   1   1   0    1   0    2  0,2,4,6
2g.24gb            1  14      2     3   32   23552   2   2   0    2   0    2  0,2,4
3g.48gb            2   9      3     2   60   47616   3   3   0    3   0    4  0,4
4g.48gb            3   5      4     1   64   47616   4   4   0    4   0    4  0
7g.96gb            4   0      7     1  132   95232   8   7   0    7   1    8  0
"""

# Not captured: placements, and the rows 3g, 4g and 7g; their memory is the share of the whole GPU's.
GH200_144GB = """
1g.18gb            0  19      1     7   16   17920   1   1   0    1   0    1  0,1,2,3,4,5,6
1g.18gb+me         7  20      1     1   16   17920   1   1   0    1   1    1  0,1,2,3,4,5,6
1g.36gb            9  15      1     4   26   36096   1   1   0    1   0    2  0,2,4,6
2g.36gb            1  14      2     3   32   36096   2   2   0    2   0    2  0,2,4
3g.72gb            2   9      3     2   60   73415   3   3   0    3   0    4  0,4
4g.72gb            3   5      4     1   64   73415   4   4   0    4   0    4  0
7g.144gb           4   0      7     1  132  146831   8   7   0    7   1    8  0
"""

# Placements not captured.
H200_141GB = """
1g.18gb            0  19      1     7   16   16384   1   1   0    1   0    1  0,1,2,3,4,5,6
1g.18gb+me         7  20      1     1   16   16384   1   1   0    1   1    1  0,1,2,3,4,5,6
1g.35gb            9  15      1     4   26   33024   1   1   0    1   0    2  0,2,4,6
2g.35gb            1  14      2     3   32   33024   2   2   0    2   0    2  0,2,4
3g.71gb            2   9      3     2   60   71168   3   3   0    3   0    4  0,4
4g.71gb            3   5      4     1   64   71168   4   4   0    4   0    4  0
7g.141gb           4   0      7     1  132  143104   8   7   0    7   1    8  0
"""

# Not captured: placements, and the rows 3g, 4g and 7g; the SMs of 3g are scaled from the H100's, the memory of 7g is
# the GPU's.
B200_180GB = """
1g.23gb            0  19      1     7   18   22528   2   1   0    1   0    1  0,1,2,3,4,5,6
1g.23gb+me         7  20      1     1   18   22528   2   1   0    1   1    1  0,1,2,3,4,5,6
1g.45gb            9  15      1     4   30   45312   2   1   0    1   0    2  0,2,4,6
2g.45gb            1  14      2     3   36   45312   4   2   0    2   0    2  0,2,4
3g.90gb            2   9      3     2   68   91136   6   3   0    3   0    4  0,4
4g.90gb            3   5      4     1   72   91136   8   4   0    4   0    4  0
7g.180gb           4   0      7     1  148  183359  16   7   0    7   1    8  0
"""

RTX_PRO_6000 = """
1g.24gb            0  14      1     4   46   24192   1   1   1    1   0    3  0,3,6,9
1g.24gb+me         7  21      1     1   46   24192   1   1   1    1   1    3  0,3,6,9
1g.24gb+gfx       10  47      1     4   46   24192   1   1   1    1   0    3  0,3,6,9
1g.24gb+me.all    15  65      1     1   46   24192   1   4   4    4   1    3  0,3,6,9
1g.24gb-me        13  67      1     4   46   24192   1   0   0    0   0    3  0,3,6,9
2g.48gb            1   5      2     2   94   48512   2   2   2    2   0    6  0,6
2g.48gb+gfx       11  35      2     2   94   48512   2   2   2    2   0    6  0,6
2g.48gb+me.all    16  64      2     1   94   48512   2   4   4    4   1    6  0,6
2g.48gb-me        14  66      2     2   94   48512   2   0   0    0   0    6  0,6
4g.96gb            3   0      4     1  188   97408   4   4   4    4   1   12  0
4g.96gb+gfx       12  32      4     1  188   97408   4   4   4    4   1   12  0
"""

# Compute-instance profiles by the compute slices of the GPU instance that they are in: enum (which is also the id),
# slices, instanceCount, starts. Row 7 is `1_SLICE_REV1`: the driver describes it, no capture shows one being created.
COMPUTE = MappingProxyType(
    {
        1: """
0  1  1  0
7  1  1  0
""",
        2: """
0  1  2  0,1
1  2  1  0
""",
        3: """
0  1  3  0,1,2
1  2  1  0
2  3  1  0
""",
        4: """
0  1  4  0,1,2,3
1  2  2  0,2
3  4  1  0
""",
        7: """
0  1  7  0,1,2,3,4,5,6
1  2  3  0,2,4
2  3  2  0,4
3  4  1  0
4  7  1  0
""",
    }
)
