//go:build tools

// Package oldest pins the API server of the oldest Kubernetes that Everstep is for.
package oldest

import _ "k8s.io/kubernetes/cmd/kube-apiserver"
