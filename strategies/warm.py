"""Imported by the process that workers are forked from: loads what PyTorch loads late, at the first optimizer.

Making one imports several hundred modules (half a second). Done once here, every worker starts with them, in pages that
all share. `import torch._dynamo` would load more than is needed, and take twice as long.
"""

import torch

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
