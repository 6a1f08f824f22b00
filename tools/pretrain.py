raise SystemExit("error: this command is now python -m rook.pretrain.")
