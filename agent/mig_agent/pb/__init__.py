"""Generated from `proto/` by `hack/proto.sh`; never edited by hand."""
