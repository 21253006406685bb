// What a scheduler written in Go does with the API, from a plan to the end of a lease: over a Unix socket, or over TCP
// with certificates. Prints what it was told as JSON; whatever fails ends it with words and 1.
//
// The stubs that it imports are generated from proto/ when the tests run, by tests/callers/conftest.py.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	api "mig-agent.io/api/migagent/v1"
)

const refusalTrailer = "migagent-refusal-bin"

// refusal is what a program is told when the agent says no.
type refusal struct {
	Code      string   `json:"code"`
	Reason    string   `json:"reason"`
	Retryable bool     `json:"retryable"`
	Revision  *uint64  `json:"revision"`
	Changed   []string `json:"changed"`
}

// report is all that happened.
type report struct {
	Profile         string   `json:"profile"`
	Steps           []string `json:"steps"`
	Score           float64  `json:"score"`
	ExpectedSeconds *float64 `json:"expected_seconds"`
	WastedMib       *float64 `json:"wasted_mib"`
	Lease           string   `json:"lease"`
	Again           string   `json:"again"`
	Device          string   `json:"device"`
	Visible         string   `json:"visible"`
	HolderInStatus  string   `json:"holder_in_status"`
	PromisedTo      string   `json:"promised_to"`
	Renewed         float64  `json:"renewed_for_seconds"`
	Events          []string `json:"events"`
	TooLarge        refusal  `json:"too_large"`
	Outdated        refusal  `json:"outdated"`
}

func main() {
	address := flag.String("address", "unix:///run/mig-agent/mig-agent.sock", "unix:///path, or host:port")
	ca := flag.String("tls-ca", "", "over TCP: who may sign the agent's certificate (PEM)")
	cert := flag.String("tls-cert", "", "over TCP: the own certificate (PEM)")
	key := flag.String("tls-key", "", "over TCP: its key (PEM)")
	serverName := flag.String("tls-server-name", "", "over TCP: the name in the agent's certificate, where it is not the address's host")
	memory := flag.String("memory", "4G", "how much to ask for")
	podName := flag.String("pod", "", "for which pod, as NAMESPACE/NAME/UID")
	limit := flag.Duration("limit", 90*time.Second, "for everything")
	flag.Parse()

	ctx, cancel := context.WithTimeout(context.Background(), *limit)
	defer cancel()
	pod, err := podOf(*podName)
	var told *report
	if err == nil {
		told, err = run(ctx, connecting{*address, *ca, *cert, *key, *serverName}, asking{*memory, pod})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cannot go on:", err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(told); err != nil {
		fmt.Fprintln(os.Stderr, "cannot tell:", err)
		os.Exit(1)
	}
}

// connecting says where the agent is, and who is to be trusted there.
type connecting struct {
	address, ca, cert, key, serverName string
}

// dial opens a connection: plain over a Unix socket, mutual TLS over TCP.
func (to connecting) dial() (*grpc.ClientConn, error) {
	if strings.HasPrefix(to.address, "unix:") {
		return grpc.NewClient(to.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	if _, err := tls.LoadX509KeyPair(to.cert, to.key); err != nil {
		return nil, err
	}
	signer, err := os.ReadFile(to.ca)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(signer) {
		return nil, fmt.Errorf("there is no certificate in %s", to.ca)
	}
	secured := credentials.NewTLS(&tls.Config{
		// Read at each connection: certificates are renewed while a scheduler runs.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			own, err := tls.LoadX509KeyPair(to.cert, to.key)
			return &own, err
		},
		RootCAs:    roots,
		ServerName: to.serverName,
		MinVersion: tls.VersionTLS13,
	})
	return grpc.NewClient("dns:///"+to.address, grpc.WithTransportCredentials(secured), grpc.WithNoProxy())
}

// asking says what is wanted.
type asking struct {
	memory string
	pod    *api.Pod
}

// podOf reads NAMESPACE/NAME/UID; nil for an empty text.
func podOf(text string) (*api.Pod, error) {
	if text == "" {
		return nil, nil
	}
	parts := strings.Split(text, "/")
	if len(parts) != 3 {
		return nil, fmt.Errorf("a pod is NAMESPACE/NAME/UID, and not %q", text)
	}
	return &api.Pod{Namespace: parts[0], Name: parts[1], Uid: parts[2]}, nil
}

func run(ctx context.Context, to connecting, ask asking) (*report, error) {
	connection, err := to.dial()
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	agent := api.NewPartitionManagerClient(connection)
	told := &report{}

	// How would it be served, and how good would that be?
	request := ask.request()
	plans, err := agent.Plan(ctx, &api.PlanRequest{Requests: []*api.Request{request}})
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	plan := plans.Outcomes[0].GetPlan()
	if plan == nil {
		return nil, fmt.Errorf("plan: %s", plans.Outcomes[0].GetRefusal().GetMessage())
	}
	told.Profile = plan.Devices[0].Profile
	told.Score = plan.Score
	told.ExpectedSeconds, told.WastedMib = plan.ExpectedSeconds, plan.WastedMib
	for _, step := range plan.Steps {
		told.Steps = append(told.Steps, strings.ToLower(strings.TrimPrefix(step.Kind.String(), "STEP_KIND_")))
	}

	// What happens from the plan on.
	watching, err := agent.Watch(ctx, &api.WatchRequest{AfterRevision: proto.Uint64(plans.Revision)})
	if err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}

	// If the node has not changed since: taken, for a minute until it is confirmed. Asking again is safe.
	request.IfRevision = proto.Uint64(plans.Revision)
	request.TtlSeconds = proto.Float64(60)
	granted, err := acquire(ctx, agent, request)
	if err != nil {
		return nil, fmt.Errorf("acquire: %w", err)
	}
	lease := granted.Lease
	told.Lease, told.Device = lease.Id, lease.Devices[0].Uuid
	told.Visible = granted.Env["NVIDIA_VISIBLE_DEVICES"]
	again, err := acquire(ctx, agent, request)
	if err != nil {
		return nil, fmt.Errorf("acquire again: %w", err)
	}
	told.Again = again.Lease.Id

	// Another request by the same plan comes too late, and one for too much never has its turn.
	late := ask.request()
	late.IfRevision = request.IfRevision
	if told.Outdated, err = refused(ctx, agent, late); err != nil {
		return nil, err
	}
	if told.TooLarge, err = refused(ctx, agent, asking{"900G", ask.pod}.request()); err != nil {
		return nil, err
	}

	node, err := agent.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	for _, each := range node.Leases {
		if each.Id == lease.Id {
			told.HolderInStatus = each.Holder.Name
			if each.Pod != nil && !each.Arrived {
				told.PromisedTo = each.Pod.Namespace + "/" + each.Pod.Name
			}
		}
	}

	// Confirmed, and given back.
	renewed, err := agent.Renew(ctx, &api.RenewRequest{
		Lease: lease.Id, Token: granted.Token, TtlSeconds: proto.Float64(3600),
	})
	if err != nil {
		return nil, fmt.Errorf("renew: %w", err)
	}
	told.Renewed = renewed.Lease.GetExpiresAt() - lease.GetExpiresAt()
	if _, err := agent.Release(ctx, &api.ReleaseRequest{Lease: lease.Id, Token: granted.Token}); err != nil {
		return nil, fmt.Errorf("release: %w", err)
	}
	for {
		answer, err := watching.Recv()
		if err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		if answer.Event.GetLease() != lease.Id {
			continue
		}
		told.Events = append(told.Events, answer.Event.Kind)
		if answer.Event.Kind == "lease-ended" {
			return told, nil
		}
	}
}

// request is one for one device with so much memory; for a pod, it is the pod that holds it.
func (ask asking) request() *api.Request {
	holder := &api.Holder{Name: "go"}
	if ask.pod != nil {
		holder = &api.Holder{Pod: ask.pod}
	}
	return &api.Request{
		Wants:     []*api.Want{{What: &api.Want_Memory{Memory: ask.memory}}},
		RequestId: fmt.Sprintf("go-%d-%d", os.Getpid(), time.Now().UnixNano()),
		Holder:    holder,
	}
}

// acquire reads the stream to its end: places in the queue, then the lease, which it confirms.
func acquire(ctx context.Context, agent api.PartitionManagerClient, request *api.Request) (*api.Granted, error) {
	stream, err := agent.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	// What ends the stream, Recv tells: an error of Send says only that it has ended.
	_ = stream.Send(&api.AcquireRequest{Step: &api.AcquireRequest_Request{Request: request}})
	var granted *api.Granted
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) && granted != nil {
			return granted, nil
		}
		if err != nil {
			return nil, &failure{err: err, trailer: stream.Trailer()}
		}
		if answer.GetGranted() != nil {
			granted = answer.GetGranted()
			// Without this the lease ends at granted.ConfirmBy. The agent ends the stream when it has heard it.
			_ = stream.Send(&api.AcquireRequest{Step: &api.AcquireRequest_Received{Received: &api.Received{}}})
		}
	}
}

// failure is a failed call with its trailing metadata, in which the typed details of a refusal travel.
type failure struct {
	err     error
	trailer metadata.MD
}

func (each *failure) Error() string { return each.err.Error() }

// refused has the agent say no, and reads how.
func refused(ctx context.Context, agent api.PartitionManagerClient, request *api.Request) (refusal, error) {
	_, err := acquire(ctx, agent, request)
	var failed *failure
	if !errors.As(err, &failed) || len(failed.trailer.Get(refusalTrailer)) != 1 {
		return refusal{}, fmt.Errorf("this should have been refused with details, and was not: %v", err)
	}
	var detail api.RefusalDetail
	if err := proto.Unmarshal([]byte(failed.trailer.Get(refusalTrailer)[0]), &detail); err != nil {
		return refusal{}, err
	}
	if status.Code(failed.err) == codes.Unknown {
		return refusal{}, fmt.Errorf("a refusal without a status: %w", failed.err)
	}
	return refusal{
		Code:      status.Code(failed.err).String(),
		Reason:    detail.Reason,
		Retryable: detail.Retryable,
		Revision:  detail.Revision,
		Changed:   detail.Changed,
	}, nil
}
