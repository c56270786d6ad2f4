"""`eyas check`: what engines will do with an EAGLE-3 drafter, whoever wrote it; repaired where that is no guess."""
