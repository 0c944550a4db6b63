// server/translate/control.h: the requests without tensors, from protobuf to the engine's
// ControlRequest and back. Every number is held against limits.h before it becomes one of ours.
//
// Does not manage: whether handles exist, rooms, leases (the engine).
// Threads: pure functions. Errors: INVALID_ARGUMENT, NOT_FOUND (model).
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/engine/messages.h"
#include "server/translate/catalog.h"

namespace fp8kvd::translate {

using ControlRequestPtr = std::unique_ptr<engine::ControlRequest>;

absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::CreateSequencesRequest& from);
absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::ForkSequencesRequest& from);
absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::TruncateSequencesRequest& from);
absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::FreeSequencesRequest& from);
absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::RenewSequencesRequest& from);
absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::StatSequencesRequest& from);
absl::StatusOr<ControlRequestPtr> ToControl(const Catalog& catalog,
                                            const v1::ListSequencesRequest& from);

// `from` was answered with an OK status.
void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::CreateSequencesResponse* to);
void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::ForkSequencesResponse* to);
void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::TruncateSequencesResponse* to);
void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::FreeSequencesResponse* to);
void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::RenewSequencesResponse* to);
void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::StatSequencesResponse* to);
void ToReply(const Catalog& catalog, const engine::ControlRequest& from,
             v1::ListSequencesResponse* to);

// All of GetServerInfo but what changes: pages in use, draining.
v1::GetServerInfoResponse ServerInfo(const Catalog& catalog);

v1::Handle FromHandle(const cache::SeqHandle& handle);
v1::Precision FromPrecision(Precision precision);

}  // namespace fp8kvd::translate
