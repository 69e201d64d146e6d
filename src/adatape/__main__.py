"""`python -m adatape`, which torchrun needs: `torchrun --nproc-per-node 8 -m adatape train …`."""

from adatape.cli import main

main()
