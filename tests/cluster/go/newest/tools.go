//go:build tools

// Package newest pins the API server and the scheduler of the newest Kubernetes that Everstep is for.
package newest

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
)
