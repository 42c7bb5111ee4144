// runc-capfix is an OCI runtime: it strips from the bundle every capability that this machine's bounding set lacks, then
// becomes the real runc.
//
// dockerd 20.10 asks for all capabilities for --privileged, and runc refuses what it cannot apply ("unable to apply
// caps: operation not permitted"). It is used only where the bounding set is incomplete.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// In the order of their numbers: linux/capability.h.
var names = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID
SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER
SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE
SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN
SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

func bounding() (map[string]bool, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(status), "\n") {
		if value, ok := strings.CutPrefix(line, "CapBnd:"); ok {
			mask, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if err != nil {
				return nil, err
			}
			have := map[string]bool{}
			for i, name := range names {
				have["CAP_"+name] = mask&(1<<uint(i)) != 0
			}
			return have, nil
		}
	}
	return nil, fmt.Errorf("no CapBnd in /proc/self/status")
}

// strip rewrites the capability sets of an OCI config.json (or of a bare process.json).
func strip(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var doc map[string]any
	if err := json.Unmarshal(raw, &doc); err != nil {
		return err
	}
	process := doc
	if inner, ok := doc["process"].(map[string]any); ok {
		process = inner
	}
	sets, _ := process["capabilities"].(map[string]any)
	if sets == nil {
		return nil
	}
	have, err := bounding()
	if err != nil {
		return err
	}
	for set, value := range sets {
		kept := []any{}
		list, _ := value.([]any)
		for _, item := range list {
			if name, _ := item.(string); have[name] {
				kept = append(kept, name)
			}
		}
		sets[set] = kept
	}
	out, err := json.Marshal(doc)
	if err != nil {
		return err
	}
	return os.WriteFile(path, out, 0o600)
}

// target is the file with capabilities that this runc command line will read, if it reads one.
func target(args []string) string {
	command, bundle, process := "", ".", ""
	for i, arg := range args {
		next := ""
		if i+1 < len(args) {
			next = args[i+1]
		}
		switch arg {
		case "create", "run", "exec":
			if command == "" {
				command = arg
			}
		case "--bundle", "-b":
			bundle = next
		case "--process", "-p":
			process = next
		}
	}
	switch command {
	case "create", "run":
		return filepath.Join(bundle, "config.json")
	case "exec":
		return process
	}
	return ""
}

func main() {
	if path := target(os.Args[1:]); path != "" {
		if err := strip(path); err != nil {
			fmt.Fprintln(os.Stderr, "runc-capfix: left as it was:", err)
		}
	}
	for _, runc := range []string{"/usr/sbin/runc", "/usr/bin/runc", "/usr/local/sbin/runc", "/usr/local/bin/runc"} {
		if _, err := os.Stat(runc); err == nil {
			err = syscall.Exec(runc, append([]string{"runc"}, os.Args[1:]...), os.Environ())
			fmt.Fprintln(os.Stderr, "runc-capfix:", err)
			os.Exit(1)
		}
	}
	fmt.Fprintln(os.Stderr, "runc-capfix: no runc in /usr/sbin, /usr/bin, /usr/local/sbin, /usr/local/bin")
	os.Exit(1)
}
