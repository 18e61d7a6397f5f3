# td_install() installs the libraries, their headers, and the files by which other projects find them:
# find_package(tandem) and tandem.pc.

include(CMakePackageConfigHelpers)

# Public headers are <module>/<module>.h and the files in this list. ci/check/symbols.py compares them with
# the symbols that the library exports.
set(TD_PUBLIC_HEADERS base/base.h base/build.h base/clock.h base/dtype.h base/rng.h base/safetensors.h base/stats.h base/status.h
    comm/launch.h transformer/hooks.h)

function(td_install)
  get_property(modules GLOBAL PROPERTY TD_MODULES)
  foreach(module IN LISTS modules)
    string(REPLACE "td_" "" name ${module})
    if(NOT name MATCHES "^(base|kernels)$")
      list(APPEND TD_PUBLIC_HEADERS ${name}/${name}.h)
    endif()
  endforeach()
  set_property(GLOBAL PROPERTY TD_PUBLIC_HEADERS ${TD_PUBLIC_HEADERS})
  # Users of the library find all public headers in one folder, in the build tree and in an installed tree.
  set(folder "${PROJECT_BINARY_DIR}/include/tandem")
  set(written "")
  foreach(header IN LISTS TD_PUBLIC_HEADERS)
    get_filename_component(name ${header} NAME)
    if("${folder}/${name}" IN_LIST written)
      message(FATAL_ERROR "two public headers are called ${name}, which others include as <tandem/${name}>")
    endif()
    add_custom_command(OUTPUT "${folder}/${name}" VERBATIM
      COMMAND "${CMAKE_COMMAND}" "-DIN=${PROJECT_SOURCE_DIR}/impl/${header}" "-DOUT=${folder}/${name}"
              -P "${PROJECT_SOURCE_DIR}/cmake/header.cmake"
      DEPENDS "${PROJECT_SOURCE_DIR}/impl/${header}" "${PROJECT_SOURCE_DIR}/cmake/header.cmake"
      COMMENT "Writing tandem/${name}")
    list(APPEND written "${folder}/${name}")
  endforeach()
  add_custom_target(td_public_headers DEPENDS ${written})
  add_dependencies(tandem_shared td_public_headers)
  add_dependencies(tandem_static td_public_headers)
  install(FILES ${written} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tandem")
  install(FILES "${PROJECT_BINARY_DIR}/impl/libtandem.cdef" DESTINATION "${CMAKE_INSTALL_LIBDIR}")

  set(package "${CMAKE_INSTALL_LIBDIR}/cmake/tandem")
  foreach(kind shared static)
    install(TARGETS tandem_${kind} EXPORT tandem-${kind}
            LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
    install(EXPORT tandem-${kind} NAMESPACE tandem:: DESTINATION "${package}")
  endforeach()
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/tandemConfig.cmake.in"
                                "${PROJECT_BINARY_DIR}/tandemConfig.cmake" INSTALL_DESTINATION "${package}")
  # Each library finds the engines of collectives in its own folder.
  get_property(engines GLOBAL PROPERTY TD_ENGINES)
  if(engines)
    install(TARGETS ${engines} LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  endif()
  foreach(library IN ITEMS tandem_shared LISTS engines)
    td_add_run_path(${library} "${CMAKE_INSTALL_LIBDIR}" "$ORIGIN")
  endforeach()
  # Before 1.0 a new minor version may change the interface.
  write_basic_package_version_file("${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
  install(FILES "${PROJECT_BINARY_DIR}/tandemConfig.cmake" "${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake"
          "${PROJECT_SOURCE_DIR}/cmake/Finddnnl.cmake" DESTINATION "${package}")

  # tandem.pc finds the prefix from its own place, so an installed tree can be moved.
  set(pc_folder "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  file(RELATIVE_PATH TANDEM_PC_TO_PREFIX "/${pc_folder}" "/")
  set(TANDEM_PC_CUDA "")
  if(TANDEM_HAVE_CUDA)
    set(TANDEM_PC_CUDA "-L${TANDEM_CUDART_FOLDER} -lcudart_static -ldl -lrt -lpthread -lstdc++")
  endif()
  configure_file("${PROJECT_SOURCE_DIR}/cmake/tandem.pc.in" "${PROJECT_BINARY_DIR}/tandem.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/tandem.pc" DESTINATION "${pc_folder}")
endfunction()
