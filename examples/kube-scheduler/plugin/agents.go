package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	clientset "k8s.io/client-go/kubernetes"
	discovery "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/utils/ptr"

	api "mig-agent.io/api/migagent/v1"
)

const (
	ttl            = 60 * time.Second // until a lease ends by itself that was not confirmed
	answer         = 5 * time.Second  // for a call that needs no work
	making         = 30 * time.Second // for one that may have to make instances
	refusalTrailer = "migagent-refusal-bin"
)

// args are the plugin's in the configuration.
type args struct {
	Namespace string `json:"namespace"` // of the agents' Service
	Service   string `json:"service"`
	TLS       string `json:"tls"` // a folder with tls.crt, tls.key and ca.crt
}

// agents are those of the nodes, by the endpoints of their Service.
type agents struct {
	slices discovery.EndpointSliceLister
	secure credentials.TransportCredentials
	lock   sync.Mutex
	opened map[string]*grpc.ClientConn // by address
	// By pod UID: closed when the lease of a scheduling cycle before has been given back.
	leaving sync.Map
}

func findAgents(ctx context.Context, client clientset.Interface, where args) (*agents, error) {
	authority, err := os.ReadFile(filepath.Join(where.TLS, "ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return nil, fmt.Errorf("cannot find a certificate in ca.crt of %s", where.TLS)
	}
	secure := credentials.NewTLS(&tls.Config{
		// Read at each connection: certificates are renewed while a scheduler runs.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			own, err := tls.LoadX509KeyPair(filepath.Join(where.TLS, "tls.crt"), filepath.Join(where.TLS, "tls.key"))
			return &own, err
		},
		RootCAs:    roots,
		ServerName: where.Service + "." + where.Namespace + ".svc", // in the agents' certificates; they are called by address
		MinVersion: tls.VersionTLS13,
	})
	watching := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(where.Namespace),
		informers.WithTweakListOptions(func(asked *metav1.ListOptions) {
			asked.LabelSelector = "kubernetes.io/service-name=" + where.Service
		}))
	lister := watching.Discovery().V1().EndpointSlices().Lister()
	watching.Start(ctx.Done())
	watching.WaitForCacheSync(ctx.Done())
	return &agents{slices: lister, secure: secure, opened: map[string]*grpc.ClientConn{}}, nil
}

// of finds the agent of a node that is ready.
func (a *agents) of(node string) (api.PartitionManagerClient, error) {
	found, err := a.slices.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	for _, slice := range found {
		for _, each := range slice.Endpoints {
			if ptr.Deref(each.NodeName, "") != node || !ptr.Deref(each.Conditions.Ready, true) {
				continue
			}
			for _, port := range slice.Ports {
				if ptr.Deref(port.Name, "") == "grpc" {
					return a.dial(net.JoinHostPort(each.Addresses[0], strconv.Itoa(int(ptr.Deref(port.Port, 0)))))
				}
			}
		}
	}
	return nil, errors.New("no agent is ready there")
}

func (a *agents) dial(address string) (api.PartitionManagerClient, error) {
	a.lock.Lock()
	defer a.lock.Unlock()
	if a.opened[address] == nil {
		opened, err := grpc.NewClient("dns:///"+address, grpc.WithTransportCredentials(a.secure), grpc.WithNoProxy())
		if err != nil {
			return nil, err
		}
		a.opened[address] = opened
	}
	return api.NewPartitionManagerClient(a.opened[address]), nil
}

// plan is how well a node would serve it (lower is better), or in words why it cannot.
func (a *agents) plan(ctx context.Context, node string, wants []*api.Want) (float64, string, error) {
	agent, err := a.of(node)
	if err != nil {
		return 0, "", err
	}
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	plans, err := agent.Plan(ctx, &api.PlanRequest{Requests: []*api.Request{{Wants: wants, Isolation: "mig"}}})
	if err != nil {
		return 0, "", said(err)
	}
	return plans.Outcomes[0].GetPlan().GetScore(), plans.Outcomes[0].GetRefusal().GetMessage(), nil
}

// promise is a lease for a pod that has not come yet.
type promise struct {
	agent   api.PartitionManagerClient
	taken   chan struct{} // closed when the agent has answered
	granted *api.Granted
	err     error
	keep    bool // the pod may have been bound with it
}

// promise begins to take a lease. It ends by itself when it is not confirmed.
func (a *agents) promise(node string, pod *v1.Pod, wants []*api.Want) *promise {
	p := &promise{taken: make(chan struct{})}
	go func() {
		defer close(p.taken)
		// The same id gives the same lease, which would end under this cycle's hands.
		if before, ok := a.leaving.Load(pod.UID); ok {
			<-before.(chan struct{})
		}
		if p.agent, p.err = a.of(node); p.err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), making)
		defer cancel()
		// An id whose lease has ended is spent: the next lease for the same pod has another.
		for number := 1; ; number++ {
			var reason string
			p.granted, reason, p.err = acquire(ctx, p.agent, &api.Request{
				Wants:      wants,
				RequestId:  fmt.Sprintf("%s-%d", pod.UID, number),
				Holder:     &api.Holder{Pod: &api.Pod{Namespace: pod.Namespace, Name: pod.Name, Uid: string(pod.UID)}},
				TtlSeconds: proto.Float64(ttl.Seconds()),
			})
			if reason != "lease-ended" && reason != "request-id-reused" {
				return
			}
		}
	}()
	return p
}

// confirm returns when the lease has no deadline any more.
func (p *promise) confirm(ctx context.Context) error {
	select {
	case <-p.taken:
	case <-ctx.Done():
		return ctx.Err()
	}
	if p.err != nil {
		return p.err
	}
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	_, err := p.agent.Renew(ctx, &api.RenewRequest{Lease: p.granted.Lease.Id, Token: p.granted.Token})
	return said(err)
}

// giveBackSoon does so when the answer to Acquire has come; a promise for the same pod that is made meanwhile waits.
func (a *agents) giveBackSoon(p *promise, pod *v1.Pod) {
	done := make(chan struct{})
	a.leaving.Store(pod.UID, done)
	go func() {
		defer close(done)
		p.giveBack()
		a.leaving.CompareAndDelete(pod.UID, done)
	}()
}

// giveBack ends the lease, if it was given. One whose pod may have been bound gets a deadline again: the pod has come
// by then, and if it has not, the lease would be in the way of its next plan.
func (p *promise) giveBack() {
	<-p.taken
	if p.granted == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), answer)
	defer cancel()
	if p.keep {
		_, _ = p.agent.Renew(ctx, &api.RenewRequest{
			Lease: p.granted.Lease.Id, Token: p.granted.Token, TtlSeconds: proto.Float64(ttl.Seconds()),
		})
		return
	}
	// Where this is not answered: at its deadline, or when the agent learns that the pod is elsewhere.
	_, _ = p.agent.Release(ctx, &api.ReleaseRequest{Lease: p.granted.Lease.Id, Token: p.granted.Token})
}

func (p *promise) uuids() []string {
	var found []string
	for _, device := range p.granted.Lease.Devices {
		found = append(found, device.Uuid)
	}
	return found
}

// acquire reads the stream to its end and confirms the lease. Of a refusal it tells the reason, a word, as well.
func acquire(ctx context.Context, agent api.PartitionManagerClient, request *api.Request) (*api.Granted, string, error) {
	stream, err := agent.Acquire(ctx)
	if err != nil {
		return nil, "", said(err)
	}
	// What ends the stream, Recv tells: an error of Send says only that it has ended.
	_ = stream.Send(&api.AcquireRequest{Step: &api.AcquireRequest_Request{Request: request}})
	var granted *api.Granted
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) && granted != nil {
			return granted, "", nil
		}
		if err != nil {
			var detail api.RefusalDetail
			if found := stream.Trailer().Get(refusalTrailer); len(found) == 1 {
				_ = proto.Unmarshal([]byte(found[0]), &detail)
			}
			return nil, detail.Reason, said(err)
		}
		if answer.GetGranted() != nil {
			granted = answer.GetGranted()
			// Without this the lease ends at granted.ConfirmBy. The agent ends the stream when it has heard it.
			_ = stream.Send(&api.AcquireRequest{Step: &api.AcquireRequest_Received{Received: &api.Received{}}})
		}
	}
}

// said is an error with the agent's own words.
func said(err error) error {
	if err == nil {
		return nil
	}
	return errors.New(status.Convert(err).Message())
}
